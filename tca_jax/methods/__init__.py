"""Attention methods: what prompt queries attend to and what stays in the cache. One file a method, one registry."""
