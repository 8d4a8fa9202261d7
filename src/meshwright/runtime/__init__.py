"""(Module, Plan) → Program. The only room that makes collective calls; it decides nothing."""
