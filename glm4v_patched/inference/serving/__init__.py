"""``glm4v-patched serve``: a server for clients of OpenAI's API."""
