"""The version of this package: part of what cached files follow from."""

VERSION = "0.1.0"
