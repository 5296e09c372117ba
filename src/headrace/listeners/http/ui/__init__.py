"""The dashboard: static files that a browser runs. Everything it shows comes from the HTTP APIs."""
