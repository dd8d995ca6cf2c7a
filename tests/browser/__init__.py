"""The console in a real browser: Chromium, the real server, a real agent."""
