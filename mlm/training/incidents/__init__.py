"""Steps that go wrong: found, recorded, acted upon and replayed; silent corruption and slow ranks."""
