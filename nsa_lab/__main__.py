"""Entry point of `python -m nsa_lab` and of the console script `nsa-lab`."""

from __future__ import annotations

import sys

from nsa_lab.config.optional_deps import MissingPackage


def main() -> None:
    """Run the command line. Exit with status 2 if one of its optional packages is not installed.

    Any other failing import is a bug and keeps its traceback.
    """
    try:
        from nsa_lab.cli import main as run_command_line
    except MissingPackage as error:
        print(f"nsa-lab: {error}", file=sys.stderr)
        sys.exit(2)
    run_command_line()


if __name__ == "__main__":
    main()
