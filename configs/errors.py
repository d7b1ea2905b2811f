"""What a configuration that cannot be used raises."""


class ConfigFileError(ValueError):
    """The configuration cannot be used; names the file, the key and what is allowed there."""
