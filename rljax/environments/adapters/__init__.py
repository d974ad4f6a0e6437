"""Environments of other libraries. Each library is imported when its environment is named."""
