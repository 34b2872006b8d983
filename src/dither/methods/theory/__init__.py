"""The papers' formulas on the host: noise, claimed privacy, convergence. NumPy float64, no JAX.

One module a paper, each in the same order: `# Noise` (calibration as printed, and its inverse), `# Privacy`
(the paper's theorem, with its validity conditions reported), `# Convergence` (the bound as named terms).

    common          the classical Gaussian constant, zCDP and RDP conversions, argument checks
    secure_fedavg   Li, Chang, Chi: noise on the upload, amplification by mini-batch sampling
    nbafl           Wei et al.: parameter clipping, noise on both channels, K-client scheduling
                    (its convergence: nbafl_convergence)
    dp_scaffold     Chang, Seif, Tandon: control variates, time-varying noise
                    (its convergence: dp_scaffold_convergence)

The formulas of CPFed and Concentrated are in `dither.methods.cpfed` and `dither.methods.concentrated`.

Everything here is what the *papers* say; where they are wrong, `corrected=True` or a function whose name ends
in `_corrected` says so with the erratum's id. Proven ε is the business of `dither.accounting`.

What a theorem speaks of is one immutable tuple (`Params`, `Training`); `_replace` varies it. Its fields and the
other arguments may be floats or NumPy arrays that broadcast; a bound over a 200 × 200 grid is one call.
"""
