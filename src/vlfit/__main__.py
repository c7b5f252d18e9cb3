"""``python -m vlfit`` is ``vlfit``."""

from vlfit.cli.main import main

if __name__ == "__main__":
    main()
