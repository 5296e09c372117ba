"""The dashboard: plain files for a browser, and what keeps other people's scripts out of them."""
