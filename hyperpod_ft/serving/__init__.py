"""Ask models over HTTP: an OpenAI-compatible server, its chat page, single answers, and serving on a cluster's node."""
