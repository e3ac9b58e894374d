"""The equations of LSTM, GRU and SimpleRNN, cut for the hoisted loops."""
