from __future__ import annotations

from slipstream.engine import capture


def test_decisive_kernels_are_named_by_what_they_are_and_compute_in():
    names = [
        "_Z29RNN_blockPersist_fp_LSTM_HMMAI6__halfS0_fLi1ELi128EEvPKT_PT0_S3_PS1_S3_S6_S6_PKS4_S3",
        "_Z20LSTM_elementWise_bp1I6__halfS0_fEviiPT_S2_S2_S2_S2_S2_S2_PT0_S4_ii18cudnnRNNClipMode",
        "_Z20LSTM_elementWise_bp1I6__halfS0_fEviiPT_S2_S2_S2_S2_S2_S2_PT0_S4_ii18cudnnRNNClipMode",
        "_Z24RNN_blockPersist_fp_LSTMIfffLi64EEvPKT_PT0_S2_PS0_S2_S5",
        "attention_backward",
        "nvjet_sm90_hsh_64x32_64x16_2x4_h_badd_NTT",
        "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_11FillFunctorIN3c104HalfEEESt5arrayIP",
    ]
    assert capture.name_decisive_kernels(names) == [
        "LSTM_elementWise_bp1<half>",
        "RNN_blockPersist_fp_LSTM<float>",
        "RNN_blockPersist_fp_LSTM_HMMA<half>",
        "attention_backward",
    ]
