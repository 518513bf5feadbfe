"""`python -m nsa_lab` and the console script `nsa-lab`: the command line, or a line on what it misses."""

from __future__ import annotations

import sys

from nsa_lab.extras import MissingPackage, require


def main() -> None:
    """Exits with 2, as for any wrong usage, where the packages of the command line are not installed."""
    try:
        require("typer", "rich")
    except MissingPackage as error:
        print(f"nsa-lab: {error}", file=sys.stderr)
        sys.exit(2)
    from nsa_lab import cli

    cli.main()


if __name__ == "__main__":
    main()
