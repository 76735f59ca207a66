"""gs.Session, against plain loops of ONNX Runtime's own session, and in all failures."""
