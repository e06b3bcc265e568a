"""Accounts, organizations, keys and invites: who asks, what they may, who did what."""
