#!/usr/bin/env python3
"""Django's entry point. What it does is in `rehydrate.__main__`, which the console script `rehydrate` runs too."""

from rehydrate.__main__ import main

if __name__ == "__main__":
    main()
