"""Builds, verifies and publishes the repository of the Hub. Not part of the installed package."""
