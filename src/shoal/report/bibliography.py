"""The papers behind the shipped parts, as one BibTeX file; a part names its papers by their keys in `Part.cite`."""

BIBTEX = r"""
@inproceedings{mcmahan2017fedavg,
  title     = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author    = {McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
               Ag{\"u}era y Arcas, Blaise},
  booktitle = {Proceedings of the 20th International Conference on Artificial Intelligence and Statistics},
  series    = {Proceedings of Machine Learning Research},
  volume    = {54},
  pages     = {1273--1282},
  year      = {2017},
  eprint    = {1602.05629},
  archivePrefix = {arXiv}
}

@inproceedings{li2020fedprox,
  title     = {Federated Optimization in Heterogeneous Networks},
  author    = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
               Smith, Virginia},
  booktitle = {Proceedings of Machine Learning and Systems},
  volume    = {2},
  pages     = {429--450},
  year      = {2020},
  eprint    = {1812.06127},
  archivePrefix = {arXiv}
}

@inproceedings{wang2020fednova,
  title     = {Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author    = {Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  pages     = {7611--7623},
  year      = {2020},
  eprint    = {2007.07481},
  archivePrefix = {arXiv}
}

@inproceedings{karimireddy2020scaffold,
  title     = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author    = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank J. and
               Stich, Sebastian U. and Suresh, Ananda Theertha},
  booktitle = {Proceedings of the 37th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {119},
  pages     = {5132--5143},
  year      = {2020},
  eprint    = {1910.06378},
  archivePrefix = {arXiv}
}

@inproceedings{acar2021feddyn,
  title     = {Federated Learning Based on Dynamic Regularization},
  author    = {Acar, Durmus Alp Emre and Zhao, Yue and Matas Navarro, Ramon and Mattina, Matthew and
               Whatmough, Paul N. and Saligrama, Venkatesh},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
  eprint    = {2111.04263},
  archivePrefix = {arXiv}
}

@article{hsu2019fedavgm,
  title     = {Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
  author    = {Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew},
  journal   = {arXiv preprint arXiv:1909.06335},
  year      = {2019}
}

@inproceedings{reddi2021fedopt,
  title     = {Adaptive Federated Optimization},
  author    = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
               Kone{\v{c}}n{\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
  eprint    = {2003.00295},
  archivePrefix = {arXiv}
}

@article{liu2025feddhad,
  title     = {Efficient Federated Learning with Heterogeneous Data and Adaptive Dropout},
  author    = {Liu, Ji and Ma, Beichen and Yu, Qiaolin and Jin, Ruoming and Zhou, Jingbo and Zhou, Yang and
               Dai, Huaiyu and Wang, Haixun and Dou, Dejing and Valduriez, Patrick},
  journal   = {ACM Transactions on Knowledge Discovery from Data},
  year      = {2025},
  eprint    = {2507.10430},
  archivePrefix = {arXiv}
}

@article{caldas2018feddrop,
  title     = {Expanding the Reach of Federated Learning by Reducing Client Resource Requirements},
  author    = {Caldas, Sebastian and Kone{\v{c}}n{\'y}, Jakub and McMahan, H. Brendan and Talwalkar, Ameet},
  journal   = {arXiv preprint arXiv:1812.07210},
  year      = {2018}
}

@inproceedings{horvath2021fjord,
  title     = {{FjORD}: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout},
  author    = {Horv{\'a}th, Samuel and Laskaridis, Stefanos and Almeida, Mario and Leontiadis, Ilias and
               Venieris, Stylianos and Lane, Nicholas},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  pages     = {12876--12889},
  year      = {2021},
  eprint    = {2102.13451},
  archivePrefix = {arXiv}
}

@inproceedings{diao2021heterofl,
  title     = {{HeteroFL}: Computation and Communication Efficient Federated Learning for Heterogeneous Clients},
  author    = {Diao, Enmao and Ding, Jie and Tarokh, Vahid},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
  eprint    = {2010.01264},
  archivePrefix = {arXiv}
}

@article{bouacida2020afd,
  title     = {Adaptive Federated Dropout: Improving Communication Efficiency and Generalization for
               Federated Learning},
  author    = {Bouacida, Nader and Hou, Jiahui and Zang, Hui and Liu, Xin},
  journal   = {arXiv preprint arXiv:2011.04050},
  year      = {2020}
}

@inproceedings{jiang2022fedmp,
  title     = {{FedMP}: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge Computing},
  author    = {Jiang, Zhida and Xu, Yang and Xu, Hongli and Wang, Zhiyuan and Qiao, Chunming and Zhao, Yangming},
  booktitle = {IEEE 38th International Conference on Data Engineering},
  year      = {2022},
  doi       = {10.1109/ICDE53745.2022.00062}
}

@inproceedings{xue2023fedbiad,
  title     = {{FedBIAD}: Communication-Efficient and Accuracy-Guaranteed Federated Learning with
               {B}ayesian Inference-Based Adaptive Dropout},
  author    = {Xue, Jingjing and Liu, Min and Sun, Sheng and Wang, Yuwei and Jiang, Hui and Jiang, Xuefeng},
  booktitle = {IEEE International Parallel and Distributed Processing Symposium},
  year      = {2023},
  eprint    = {2307.07172},
  archivePrefix = {arXiv}
}

@inproceedings{stich2018sparsified,
  title     = {Sparsified {SGD} with Memory},
  author    = {Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {31},
  year      = {2018},
  eprint    = {1809.07599},
  archivePrefix = {arXiv}
}

@inproceedings{lin2018dgc,
  title     = {Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training},
  author    = {Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.},
  booktitle = {International Conference on Learning Representations},
  year      = {2018},
  eprint    = {1712.01887},
  archivePrefix = {arXiv}
}

@article{sattler2019stc,
  title     = {Robust and Communication-Efficient Federated Learning from Non-{IID} Data},
  author    = {Sattler, Felix and Wiedemann, Simon and M{\"u}ller, Klaus-Robert and Samek, Wojciech},
  journal   = {arXiv preprint arXiv:1903.02891},
  year      = {2019}
}

@article{konecny2016strategies,
  title     = {Federated Learning: Strategies for Improving Communication Efficiency},
  author    = {Kone{\v{c}}n{\'y}, Jakub and McMahan, H. Brendan and Yu, Felix X. and Richt{\'a}rik, Peter and
               Suresh, Ananda Theertha and Bacon, Dave},
  journal   = {arXiv preprint arXiv:1610.05492},
  year      = {2016}
}

@inproceedings{reisizadeh2020fedpaq,
  title     = {{FedPAQ}: A Communication-Efficient Federated Learning Method with Periodic Averaging and
               Quantization},
  author    = {Reisizadeh, Amirhossein and Mokhtari, Aryan and Hassani, Hamed and Jadbabaie, Ali and
               Pedarsani, Ramtin},
  booktitle = {Proceedings of the 23rd International Conference on Artificial Intelligence and Statistics},
  year      = {2020},
  eprint    = {1909.13014},
  archivePrefix = {arXiv}
}

@inproceedings{bernstein2018signsgd,
  title     = {{signSGD}: Compressed Optimisation for Non-Convex Problems},
  author    = {Bernstein, Jeremy and Wang, Yu-Xiang and Azizzadenesheli, Kamyar and Anandkumar, Animashree},
  booktitle = {Proceedings of the 35th International Conference on Machine Learning},
  year      = {2018},
  eprint    = {1802.04434},
  archivePrefix = {arXiv}
}

@article{zhou2025fedacd,
  title     = {Enhancing the Performance of Global Model by Improving the Adaptability of Local Models in
               Federated Learning},
  author    = {Zhou, Wujun and Ding, Shu and Li, Zelin and Wang, Wei},
  journal   = {arXiv preprint arXiv:2505.10125},
  year      = {2025}
}

@inproceedings{yun2019cutmix,
  title     = {{CutMix}: Regularization Strategy to Train Strong Classifiers with Localizable Features},
  author    = {Yun, Sangdoo and Han, Dongyoon and Oh, Seong Joon and Chun, Sanghyuk and Choe, Junsuk
               and Yoo, Youngjoon},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  year      = {2019},
  eprint    = {1905.04899},
  archivePrefix = {arXiv}
}

@inproceedings{zhang2018mixup,
  title     = {mixup: Beyond Empirical Risk Minimization},
  author    = {Zhang, Hongyi and Cisse, Moustapha and Dauphin, Yann N. and Lopez-Paz, David},
  booktitle = {International Conference on Learning Representations},
  year      = {2018},
  eprint    = {1710.09412},
  archivePrefix = {arXiv}
}

@inproceedings{ren2020balanced,
  title     = {Balanced Meta-Softmax for Long-Tailed Visual Recognition},
  author    = {Ren, Jiawei and Yu, Cunjun and Sheng, Shunan and Ma, Xiao and Zhao, Haiyu and Yi, Shuai and
               Li, Hongsheng},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020},
  eprint    = {2007.10740},
  archivePrefix = {arXiv}
}

@inproceedings{zhang2022fedlc,
  title     = {Federated Learning with Label Distribution Skew via Logits Calibration},
  author    = {Zhang, Jie and Li, Zhiqi and Li, Bo and Xu, Jianghe and Wu, Shuang and Ding, Shouhong and Wu, Chao},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {162},
  pages     = {26311--26329},
  year      = {2022},
  eprint    = {2209.00189},
  archivePrefix = {arXiv}
}

@inproceedings{chen2022fedrod,
  title     = {On Bridging Generic and Personalized Federated Learning for Image Classification},
  author    = {Chen, Hong-You and Chao, Wei-Lun},
  booktitle = {International Conference on Learning Representations},
  year      = {2022},
  eprint    = {2107.00778},
  archivePrefix = {arXiv}
}

@inproceedings{lee2022fedntd,
  title     = {Preservation of the Global Knowledge by Not-True Distillation in Federated Learning},
  author    = {Lee, Gihun and Jeong, Minchan and Shin, Yongjin and Bae, Sangmin and Yun, Se-Young},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {35},
  year      = {2022},
  eprint    = {2106.03097},
  archivePrefix = {arXiv}
}

@inproceedings{shi2023feddecorr,
  title     = {Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning},
  author    = {Shi, Yujun and Liang, Jian and Zhang, Wenqing and Tan, Vincent Y. F. and Bai, Song},
  booktitle = {International Conference on Learning Representations},
  year      = {2023},
  eprint    = {2210.00226},
  archivePrefix = {arXiv}
}

@article{liu2024feddumap,
  title     = {Efficient Federated Learning Using Dynamic Update and Adaptive Pruning with Momentum on Shared Server
               Data},
  author    = {Liu, Ji and Jia, Juncheng and Zhang, Hong and Yun, Yuhui and Wang, Leye and Zhou, Yang and
               Dai, Huaiyu and Dou, Dejing},
  journal   = {ACM Transactions on Intelligent Systems and Technology},
  year      = {2024},
  doi       = {10.1145/3690648},
  eprint    = {2408.05678},
  archivePrefix = {arXiv}
}

@inproceedings{lin2020hrank,
  title     = {HRank: Filter Pruning Using High-Rank Feature Map},
  author    = {Lin, Mingbao and Ji, Rongrong and Wang, Yan and Zhang, Yichen and Zhang, Baochang and Tian, Yonghong and
               Shao, Ling},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2020},
  eprint    = {2002.10179},
  archivePrefix = {arXiv}
}

@inproceedings{dai2023fednh,
  title     = {Tackling Data Heterogeneity in Federated Learning with Class Prototypes},
  author    = {Dai, Yutong and Chen, Zeyuan and Li, Junnan and Heinecke, Shelby and Sun, Lichao and Xu, Ran},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  volume    = {37},
  year      = {2023},
  eprint    = {2212.02758},
  archivePrefix = {arXiv}
}

@inproceedings{shang2022creff,
  title     = {Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated
               Features},
  author    = {Shang, Xinyi and Lu, Yang and Huang, Gang and Wang, Hanzi},
  booktitle = {Proceedings of the Thirty-First International Joint Conference on Artificial Intelligence},
  pages     = {2218--2224},
  year      = {2022},
  eprint    = {2204.13399},
  archivePrefix = {arXiv}
}

@inproceedings{zhang2021imc,
  title     = {Validating the Lottery Ticket Hypothesis with Inertial Manifold Theory},
  author    = {Zhang, Zeru and Jin, Jiayin and Zhang, Zijie and Zhou, Yang and Zhao, Xin and Ren, Jiaxiang and
               Liu, Ji and Wu, Lingfei and Jin, Ruoming and Dou, Dejing},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  year      = {2021}
}

@article{jiang2019prunefl,
  title     = {Model Pruning Enables Efficient Federated Learning on Edge Devices},
  author    = {Jiang, Yuang and Wang, Shiqiang and Valls, V{\'i}ctor and Ko, Bong Jun and Lee, Wei-Han and
               Leung, Kin K. and Tassiulas, Leandros},
  journal   = {IEEE Transactions on Neural Networks and Learning Systems},
  year      = {2023},
  eprint    = {1909.12326},
  archivePrefix = {arXiv}
}

@inproceedings{bibikar2022feddst,
  title     = {Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning Better},
  author    = {Bibikar, Sameer and Vikalo, Haris and Wang, Zhangyang and Chen, Xiaohan},
  booktitle = {AAAI Conference on Artificial Intelligence},
  volume    = {36},
  year      = {2022},
  eprint    = {2112.09824},
  archivePrefix = {arXiv}
}

@article{zhao2018noniid,
  title     = {Federated Learning with Non-{IID} Data},
  author    = {Zhao, Yue and Li, Meng and Lai, Liangzhen and Suda, Naveen and Civin, Damon and Chandra, Vikas},
  journal   = {arXiv preprint arXiv:1806.00582},
  year      = {2018}
}

@inproceedings{yoshida2020hybridfl,
  title     = {{Hybrid-FL} for Wireless Networks: Cooperative Learning Mechanism Using Non-{IID} Data},
  author    = {Yoshida, Naoya and Nishio, Takayuki and Morikura, Masahiro and Yamamoto, Koji and Yonetani, Ryo},
  booktitle = {IEEE International Conference on Communications},
  year      = {2020},
  eprint    = {1905.07210},
  archivePrefix = {arXiv}
}

@inproceedings{lin2020feddf,
  title     = {Ensemble Distillation for Robust Model Fusion in Federated Learning},
  author    = {Lin, Tao and Kong, Lingjing and Stich, Sebastian U. and Jaggi, Martin},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020},
  eprint    = {2006.07242},
  archivePrefix = {arXiv}
}

@inproceedings{li2021fedkt,
  title     = {Practical One-Shot Federated Learning for Cross-Silo Setting},
  author    = {Li, Qinbin and He, Bingsheng and Song, Dawn},
  booktitle = {Proceedings of the 30th International Joint Conference on Artificial Intelligence},
  pages     = {1484--1490},
  year      = {2021},
  doi       = {10.24963/ijcai.2021/205},
  eprint    = {2010.01017},
  archivePrefix = {arXiv}
}

@inproceedings{jin2022fedda,
  title     = {Accelerated Federated Learning with Decoupled Adaptive Optimization},
  author    = {Jin, Jiayin and Ren, Jiaxiang and Zhou, Yang and Lyu, Lingjuan and Liu, Ji and Dou, Dejing},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {162},
  pages     = {10298--10322},
  year      = {2022}
}

@article{liu2023fedbr,
  title     = {Adaptive Block-Wise Regularization and Knowledge Distillation for Enhancing Federated Learning},
  author    = {Liu, Jianchun and Zeng, Qingmin and Xu, Hongli and Xu, Yang and Wang, Zhiyuan and Huang, He},
  journal   = {IEEE/ACM Transactions on Networking},
  year      = {2023},
  doi       = {10.1109/TNET.2023.3301972}
}

@inproceedings{kim2022fedmlb,
  title     = {Multi-Level Branched Regularization for Federated Learning},
  author    = {Kim, Jinkyu and Kim, Geeho and Han, Bohyung},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {162},
  year      = {2022},
  eprint    = {2207.06936},
  archivePrefix = {arXiv}
}

@inproceedings{li2021moon,
  title     = {Model-Contrastive Federated Learning},
  author    = {Li, Qinbin and He, Bingsheng and Song, Dawn},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2021},
  eprint    = {2103.16257},
  archivePrefix = {arXiv}
}

@inproceedings{yin2018robust,
  title     = {{Byzantine}-Robust Distributed Learning: Towards Optimal Statistical Rates},
  author    = {Yin, Dong and Chen, Yudong and Ramchandran, Kannan and Bartlett, Peter},
  booktitle = {Proceedings of the 35th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {80},
  pages     = {5650--5659},
  year      = {2018},
  eprint    = {1803.01498},
  archivePrefix = {arXiv}
}

@inproceedings{qu2022fedsam,
  title     = {Generalized Federated Learning via Sharpness Aware Minimization},
  author    = {Qu, Zhe and Li, Xingyu and Duan, Rui and Liu, Yao and Tang, Bo and Lu, Zhuo},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {162},
  year      = {2022},
  eprint    = {2206.02618},
  archivePrefix = {arXiv}
}

@inproceedings{caldarola2022fedasam,
  title     = {Improving Generalization in Federated Learning by Seeking Flat Minima},
  author    = {Caldarola, Debora and Caputo, Barbara and Ciccone, Marco},
  booktitle = {European Conference on Computer Vision},
  year      = {2022},
  eprint    = {2203.11834},
  archivePrefix = {arXiv}
}

@misc{xu2021fedcm,
  title     = {{FedCM}: Federated Learning with Client-level Momentum},
  author    = {Xu, Jing and Wang, Sen and Wang, Liwei and Yao, Andrew Chi-Chih},
  year      = {2021},
  eprint    = {2106.10874},
  archivePrefix = {arXiv}
}

@inproceedings{fan2024fedlesam,
  title     = {Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
               Sharpness-aware Minimization},
  author    = {Fan, Ziqing and Hu, Shengchao and Yao, Jiangchao and Niu, Gang and Zhang, Ya and Sugiyama, Masashi and
               Wang, Yanfeng},
  booktitle = {Proceedings of the 41st International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {235},
  year      = {2024},
  eprint    = {2405.18890},
  archivePrefix = {arXiv}
}

@inproceedings{sun2023fedspeed,
  title     = {{FedSpeed}: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy},
  author    = {Sun, Yan and Shen, Li and Huang, Tiansheng and Ding, Liang and Tao, Dacheng},
  booktitle = {International Conference on Learning Representations},
  year      = {2023},
  eprint    = {2302.10429},
  archivePrefix = {arXiv}
}

@inproceedings{sun2023fedsmoo,
  title     = {Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global Consistency
               and Smooth Landscape},
  author    = {Sun, Yan and Shen, Li and Chen, Shixiang and Ding, Liang and Tao, Dacheng},
  booktitle = {Proceedings of the 40th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {202},
  year      = {2023},
  eprint    = {2305.11584},
  archivePrefix = {arXiv}
}

@article{polyak1992averaging,
  title     = {Acceleration of Stochastic Approximation by Averaging},
  author    = {Polyak, Boris T. and Juditsky, Anatoli B.},
  journal   = {SIAM Journal on Control and Optimization},
  volume    = {30},
  number    = {4},
  pages     = {838--855},
  year      = {1992},
  doi       = {10.1137/0330046}
}

@inproceedings{izmailov2018swa,
  title     = {Averaging Weights Leads to Wider Optima and Better Generalization},
  author    = {Izmailov, Pavel and Podoprikhin, Dmitrii and Garipov, Timur and Vetrov, Dmitry and
               Wilson, Andrew Gordon},
  booktitle = {Proceedings of the 34th Conference on Uncertainty in Artificial Intelligence},
  year      = {2018},
  eprint    = {1803.05407},
  archivePrefix = {arXiv}
}

@inproceedings{caldarola2022flat,
  title     = {Improving Generalization in Federated Learning by Seeking Flat Minima},
  author    = {Caldarola, Debora and Caputo, Barbara and Ciccone, Marco},
  booktitle = {European Conference on Computer Vision},
  year      = {2022},
  eprint    = {2203.11834},
  archivePrefix = {arXiv}
}

@inproceedings{caldarola2023wima,
  title     = {Window-based Model Averaging Improves Generalization in Heterogeneous Federated Learning},
  author    = {Caldarola, Debora and Caputo, Barbara and Ciccone, Marco},
  booktitle = {Proceedings of the IEEE/CVF International Conference on Computer Vision Workshops},
  year      = {2023},
  eprint    = {2310.01366},
  archivePrefix = {arXiv}
}

@inproceedings{kim2024fedacg,
  title     = {Communication-Efficient Federated Learning with Accelerated Client Gradient},
  author    = {Kim, Geeho and Kim, Jinkyu and Han, Bohyung},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2024},
  eprint    = {2201.03172},
  archivePrefix = {arXiv}
}

@inproceedings{jhunjhunwala2023fedexp,
  title     = {{FedExP}: Speeding Up Federated Averaging via Extrapolation},
  author    = {Jhunjhunwala, Divyansh and Wang, Shiqiang and Joshi, Gauri},
  booktitle = {International Conference on Learning Representations},
  year      = {2023},
  eprint    = {2301.09604},
  archivePrefix = {arXiv}
}

@inproceedings{li2020qffl,
  title     = {Fair Resource Allocation in Federated Learning},
  author    = {Li, Tian and Sanjabi, Maziar and Beirami, Ahmad and Smith, Virginia},
  booktitle = {International Conference on Learning Representations},
  year      = {2020},
  eprint    = {1905.10497},
  archivePrefix = {arXiv}
}

@inproceedings{cho2022poc,
  title     = {Towards Understanding Biased Client Selection in Federated Learning},
  author    = {Cho, Yae Jee and Wang, Jianyu and Joshi, Gauri},
  booktitle = {Proceedings of the 25th International Conference on Artificial Intelligence and Statistics},
  series    = {Proceedings of Machine Learning Research},
  volume    = {151},
  year      = {2022},
  eprint    = {2010.01243},
  archivePrefix = {arXiv}
}

@inproceedings{lai2021oort,
  title     = {Oort: Efficient Federated Learning via Guided Participant Selection},
  author    = {Lai, Fan and Zhu, Xiangfeng and Madhyastha, Harsha V. and Chowdhury, Mosharaf},
  booktitle = {Proceedings of the 15th {USENIX} Symposium on Operating Systems Design and Implementation},
  year      = {2021},
  eprint    = {2010.06081},
  archivePrefix = {arXiv}
}

@article{sun2019backdoor,
  title     = {Can You Really Backdoor Federated Learning?},
  author    = {Sun, Ziteng and Kairouz, Peter and Suresh, Ananda Theertha and McMahan, H. Brendan},
  journal   = {arXiv preprint arXiv:1911.07963},
  year      = {2019},
  eprint    = {1911.07963},
  archivePrefix = {arXiv}
}

@article{arivazhagan2019fedper,
  title     = {Federated Learning with Personalization Layers},
  author    = {Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal   = {arXiv preprint arXiv:1912.00818},
  year      = {2019},
  eprint    = {1912.00818},
  archivePrefix = {arXiv}
}

@article{liang2020lgfedavg,
  title     = {Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author    = {Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
               Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal   = {arXiv preprint arXiv:2001.01523},
  year      = {2020},
  eprint    = {2001.01523},
  archivePrefix = {arXiv}
}

@inproceedings{li2021fedbn,
  title     = {{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
  author    = {Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
  eprint    = {2102.07623},
  archivePrefix = {arXiv}
}

@inproceedings{collins2021fedrep,
  title     = {Exploiting Shared Representations for Personalized Federated Learning},
  author    = {Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {139},
  year      = {2021},
  eprint    = {2102.07078},
  archivePrefix = {arXiv}
}

@inproceedings{oh2022fedbabu,
  title     = {{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
  author    = {Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young},
  booktitle = {International Conference on Learning Representations},
  year      = {2022},
  eprint    = {2106.06042},
  archivePrefix = {arXiv}
}

@inproceedings{li2021ditto,
  title     = {Ditto: Fair and Robust Federated Learning Through Personalization},
  author    = {Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle = {Proceedings of the 38th International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {139},
  year      = {2021},
  eprint    = {2012.04221},
  archivePrefix = {arXiv}
}

@article{deng2020apfl,
  title     = {Adaptive Personalized Federated Learning},
  author    = {Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
  journal   = {arXiv preprint arXiv:2003.13461},
  year      = {2020},
  eprint    = {2003.13461},
  archivePrefix = {arXiv}
}

@inproceedings{dinh2020pfedme,
  title     = {Personalized Federated Learning with {M}oreau Envelopes},
  author    = {Dinh, Canh T. and Tran, Nguyen H. and Nguyen, Tuan Dung},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020},
  eprint    = {2006.08848},
  archivePrefix = {arXiv}
}

@inproceedings{fallah2020perfedavg,
  title     = {Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  author    = {Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020},
  eprint    = {2002.07948},
  archivePrefix = {arXiv}
}

@inproceedings{zhang2023fedala,
  title     = {{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
  author    = {Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and
               Guan, Haibing},
  booktitle = {Proceedings of the {AAAI} Conference on Artificial Intelligence},
  volume    = {37},
  year      = {2023},
  eprint    = {2212.01197},
  archivePrefix = {arXiv}
}

@inproceedings{yang2024fedas,
  title     = {{FedAS}: Bridging Inconsistency in Personalized Federated Learning},
  author    = {Yang, Xiyuan and Huang, Wenke and Ye, Mang},
  booktitle = {Proceedings of the {IEEE/CVF} Conference on Computer Vision and Pattern Recognition},
  year      = {2024}
}

@inproceedings{hu2022lora,
  title     = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author    = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and
               Wang, Shean and Wang, Lu and Chen, Weizhu},
  booktitle = {International Conference on Learning Representations},
  year      = {2022},
  eprint    = {2106.09685},
  archivePrefix = {arXiv}
}

@inproceedings{sun2024ffalora,
  title     = {Improving {LoRA} in Privacy-preserving Federated Learning},
  author    = {Sun, Youbang and Li, Zitao and Li, Yaliang and Ding, Bolin},
  booktitle = {International Conference on Learning Representations},
  year      = {2024},
  eprint    = {2403.12313},
  archivePrefix = {arXiv}
}

@inproceedings{guo2025fedsa,
  title     = {Selective Aggregation for Low-Rank Adaptation in Federated Learning},
  author    = {Guo, Pengxin and Zeng, Shuang and Wang, Yanran and Fan, Huijie and Wang, Feifei and Qu, Liangqiong},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
  eprint    = {2410.01463},
  archivePrefix = {arXiv}
}

@inproceedings{cho2024hetlora,
  title     = {Heterogeneous {LoRA} for Federated Fine-tuning of On-Device Foundation Models},
  author    = {Cho, Yae Jee and Liu, Luyang and Xu, Zheng and Fahrezi, Aldi and Joshi, Gauri},
  booktitle = {Proceedings of the 2024 Conference on Empirical Methods in Natural Language Processing},
  year      = {2024},
  eprint    = {2401.06432},
  archivePrefix = {arXiv}
}

@inproceedings{benzaken2022bitfit,
  title     = {{BitFit}: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models},
  author    = {Ben Zaken, Elad and Goldberg, Yoav and Ravfogel, Shauli},
  booktitle = {Proceedings of the 60th Annual Meeting of the Association for Computational Linguistics},
  pages     = {1--9},
  year      = {2022},
  eprint    = {2106.10199},
  archivePrefix = {arXiv}
}

@inproceedings{lester2021prompt,
  title     = {The Power of Scale for Parameter-Efficient Prompt Tuning},
  author    = {Lester, Brian and Al-Rfou, Rami and Constant, Noah},
  booktitle = {Proceedings of the 2021 Conference on Empirical Methods in Natural Language Processing},
  year      = {2021},
  eprint    = {2104.08691},
  archivePrefix = {arXiv}
}

@inproceedings{jia2022vpt,
  title     = {Visual Prompt Tuning},
  author    = {Jia, Menglin and Tang, Luming and Chen, Bor-Chun and Cardie, Claire and Belongie, Serge and
               Hariharan, Bharath and Lim, Ser-Nam},
  booktitle = {European Conference on Computer Vision},
  year      = {2022},
  eprint    = {2203.12119},
  archivePrefix = {arXiv}
}

@inproceedings{zhao2023fedprompt,
  title     = {{FedPrompt}: Communication-Efficient and Privacy-Preserving Prompt Tuning in Federated Learning},
  author    = {Zhao, Haodong and Du, Wei and Li, Fangqi and Li, Peixuan and Liu, Gongshen},
  booktitle = {{IEEE} International Conference on Acoustics, Speech and Signal Processing},
  year      = {2023},
  eprint    = {2208.12268},
  archivePrefix = {arXiv}
}
"""
