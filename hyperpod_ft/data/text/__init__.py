"""Raw rows to text: each format's prompt and completion, chats and templates."""
