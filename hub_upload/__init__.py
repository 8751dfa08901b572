"""Build, verify and publish a repository of the Hub. Not part of the installed package."""
