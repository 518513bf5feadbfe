"""`python -m nsa_lab` and the console script `nsa-lab`: the command line, or a line on what it misses."""

from __future__ import annotations

import sys


def main() -> None:
    """Exits with 2, as for any wrong usage, where the packages of the command line are not installed."""
    try:
        from nsa_lab.cli import main as command_line
    except ModuleNotFoundError as error:
        print(f"nsa-lab: {error}", file=sys.stderr)
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
