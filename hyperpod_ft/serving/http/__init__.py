"""The server: connections, who may ask, OpenAI's requests and answers, and the chat page."""
