"""`python -m nsa_lab`: the command line."""

from nsa_lab.cli import main

if __name__ == "__main__":
    main()
