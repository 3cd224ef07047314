"""What tests share: real servers, real peers, private directories."""
