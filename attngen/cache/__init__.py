"""The cache of built modules: fingerprint of attngen, store of folders, import from memory."""
