"""LSTM, GRU and SimpleRNN with as much as possible taken out of their loops."""
