"""The command `holdfast`, as `python -m holdfast`: for whoever does not have it on the path."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
