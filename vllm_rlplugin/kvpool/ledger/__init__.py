"""Which tenant owns which page, and what tenants tell each other."""
