"""gs.Session, against plain loops of ONNX Runtime's own session, and against everything that can go wrong."""
