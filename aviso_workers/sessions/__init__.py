"""One open backend, and everything of an app that runs on it, put together."""
