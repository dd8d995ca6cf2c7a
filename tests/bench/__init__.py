"""Measurements, run by hand or by `make bench`; pytest collects nothing here. Ratios within one run count."""
