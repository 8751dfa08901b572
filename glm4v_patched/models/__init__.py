"""Which model or adapters, and whether they are whole."""
