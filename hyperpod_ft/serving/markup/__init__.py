"""What a model writes besides text for the reader: reasoning and tool calls. Pure; what is malformed stays text."""
