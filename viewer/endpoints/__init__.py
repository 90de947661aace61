"""The HTTP interface, one module an area: `router(views)` gives its endpoints, all GET, all JSON
or array bytes. Everything is computed elsewhere; here parameters are checked and the lock held."""
