"""The console without a browser: view models, words, forms, and pages over HTTP."""
