"""From a file, however packed, to records and the source that understands them."""
