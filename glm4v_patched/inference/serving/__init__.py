"""``glm4v-patched serve``: a server that speaks OpenAI's API."""
