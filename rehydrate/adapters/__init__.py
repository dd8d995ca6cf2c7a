"""The frameworks that agents are built with, each brought to the ledger by a module of its own. No Django here."""
