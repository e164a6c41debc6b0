"""For whoever writes a storage or wants proof: contract suites, a storage that fails, and a driver of crashes."""
