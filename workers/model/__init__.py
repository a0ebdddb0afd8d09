"""The target model: transformers' own modules, sharded by us, over paged attention."""
