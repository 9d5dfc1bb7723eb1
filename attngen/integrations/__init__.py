"""attngen inside other libraries, one package each. Nothing here is imported unless a user asks for it by name."""
