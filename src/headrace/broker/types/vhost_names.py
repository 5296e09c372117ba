"""Names of vhosts that the catalog, the users and the vhosts share."""

CATALOG_KIND = "vhosts"  # of their documents
DEFAULT = "/"
