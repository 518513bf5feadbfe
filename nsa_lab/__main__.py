"""`python -m nsa_lab` and the console script `nsa-lab`: the command line, or a line on what it misses."""

from __future__ import annotations

import sys

from nsa_lab.config.optional_deps import MissingPackage


def main() -> None:
    """Exits with 2, as for any wrong usage, where an optional package of the command line is not installed.

    Any other import that fails is a bug, and keeps its traceback.
    """
    try:
        from nsa_lab.cli import main as command_line
    except MissingPackage as error:
        print(f"nsa-lab: {error}", file=sys.stderr)
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
