"""The meaning of bytes: names, records, layouts, digests and value codecs. All of it is pure."""
