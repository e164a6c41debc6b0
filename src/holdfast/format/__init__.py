"""What bytes mean: names, records, layouts, digests and value codecs. All of it is pure."""
