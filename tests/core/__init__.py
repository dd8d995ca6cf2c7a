"""Tests of the pure core. None of them touches a database."""
