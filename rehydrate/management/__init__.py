"""Management commands: thin, each one hands over to a module that can be called without a command line."""
