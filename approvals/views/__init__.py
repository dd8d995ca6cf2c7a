"""The console's pages, one module a place: account, inbox, runs, decide, operate. They call services only."""
