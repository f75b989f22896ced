"""What a model writes besides text for the reader: reasoning and calls of tools. Pure; what is malformed stays text."""
