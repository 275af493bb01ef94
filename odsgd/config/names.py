"""Names of models, known without importing MXNet (a second) or GluonCV (another).

So a misspelt name is refused before any process of a job starts. The names are MXNet 1.9.1's and GluonCV
0.10.5's; tests/odsgd/training/models/test_models.py compares them with what is installed.
"""
GLUON_MODELS = tuple("""
alexnet densenet121 densenet161 densenet169 densenet201 inceptionv3
mobilenet0.25 mobilenet0.5 mobilenet0.75 mobilenet1.0
mobilenetv2_0.25 mobilenetv2_0.5 mobilenetv2_0.75 mobilenetv2_1.0
resnet18_v1 resnet34_v1 resnet50_v1 resnet101_v1 resnet152_v1
resnet18_v2 resnet34_v2 resnet50_v2 resnet101_v2 resnet152_v2
squeezenet1.0 squeezenet1.1 vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn
""".split())

GLUONCV_MODELS = tuple("""
cifar_resnet20_v1 cifar_resnet56_v1 cifar_resnet110_v1 cifar_resnet20_v2 cifar_resnet56_v2 cifar_resnet110_v2
cifar_resnext29_16x64d cifar_resnext29_32x4d cifar_wideresnet16_10 cifar_wideresnet28_10 cifar_wideresnet40_8
cifar_residualattentionnet56 cifar_residualattentionnet92 cifar_residualattentionnet452
resnet18_v1b resnet34_v1b resnet50_v1b resnet101_v1b resnet152_v1b
resnet50_v1c resnet101_v1c resnet152_v1c resnet50_v1d resnet101_v1d resnet152_v1d
resnet50_v1e resnet101_v1e resnet152_v1e resnet50_v1s resnet101_v1s resnet152_v1s
resnext50_32x4d resnext101_32x4d resnext101_64x4d se_resnext50_32x4d se_resnext101_32x4d se_resnext101_64x4d
se_resnet18_v1 se_resnet34_v1 se_resnet50_v1 se_resnet101_v1 se_resnet152_v1
se_resnet18_v2 se_resnet34_v2 se_resnet50_v2 se_resnet101_v2 se_resnet152_v2 senet_154
resnest14 resnest26 resnest50 resnest101 resnest200 resnest269
mobilenetv3_small mobilenetv3_large shufflenet_v1 shufflenet_v2 darknet53 googlenet xception
hrnet_w18_c hrnet_w18_small_v1_c hrnet_w18_small_v2_c hrnet_w30_c hrnet_w32_c hrnet_w40_c hrnet_w44_c hrnet_w48_c
residualattentionnet56 residualattentionnet92 residualattentionnet128 residualattentionnet164
""".split())

PAPERS_MODELS = ("mlp_500", "caffe_cifar10", "caffe_cifar10_pixels", "sasgd_cnn", "vgg_f")

MODELS = ("mlp", "lenet", *PAPERS_MODELS, *GLUON_MODELS, *GLUONCV_MODELS)
