"""Entry point: ``python cli.py fit -c configs/choice/quickstart.yaml``."""

from lit_madrl.cli import main

if __name__ == "__main__":
    main()
