"""Known bugs, planted in the source one at a time to see that the levels find each: `make mutants`."""
