"""The command `holdfast`, as `python -m holdfast`: if it is not on the path."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
